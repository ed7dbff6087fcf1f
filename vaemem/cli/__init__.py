"""The command line: flags.py is the table of flags, commands.py what each command takes and does."""
