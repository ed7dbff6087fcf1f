"""Published measurements of memory: rows.csv has them, sources.csv says who published them and where."""
