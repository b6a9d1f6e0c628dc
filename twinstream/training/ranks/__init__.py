"""Training on several ranks: processes of this machine, and the one that reads and writes files."""
