"""The command line: flags.py is the table of flags, commands.py what each takes and does, progress.py how far it is,
completion.py what Tab offers."""
