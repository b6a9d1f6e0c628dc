"""What users may ask for: each option is declared once, for flags, TOML and Python alike."""
