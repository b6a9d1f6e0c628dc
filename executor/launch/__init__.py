"""Ranks as processes of this machine: started, run, and ended whatever goes wrong."""
