"""What a step uses and when: units, uses, residencies, and the copies that residencies imply."""
