"""Adapters as PEFT has them in a folder: read, checked, converted and written."""
