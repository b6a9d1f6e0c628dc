"""What a step uses and when: units, uses, stays, and the copies that stays imply."""
