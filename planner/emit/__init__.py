"""From a placement to ops in issue order, their waits, and all rounds of the step."""
