"""Ranks on this machine: started, talked to, watched, and ended whatever goes wrong."""
