"""The one-launch runtime: runs verified task tables as one persistent kernel; it knows tables, but no models."""
