"""Out-of-memory messages: which run they are about."""
