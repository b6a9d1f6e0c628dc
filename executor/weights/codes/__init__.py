"""Matrices that files hold as codes, read as the values that those stand for."""
