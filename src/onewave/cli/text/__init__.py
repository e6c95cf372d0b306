"""Text that commands read from files, and the names of options in what they say."""
