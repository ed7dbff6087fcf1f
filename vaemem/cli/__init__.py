"""The command line: flags.py is the table of flags, commands.py runs the commands, parsing.py makes the parser and its
help, progress.py shows progress, completion.py answers Tab."""
