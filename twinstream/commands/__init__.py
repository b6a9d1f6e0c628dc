"""The command line's commands: each parses, calls one function and prints."""
