"""A schedule replayed in virtual time on a machine whose resources its ops share."""
