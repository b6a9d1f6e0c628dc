"""Text as training data: from files to packed chunks, in an order that a run can go on with."""
