"""The layer between a socket and the endpoints: limits, keys, errors, event streams, logs, the process's life."""
