"""The command line: flags.py says which commands and flags there are, commands.py what each command does."""
