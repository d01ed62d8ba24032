"""Who runs next, and how much of it: decisions over plain state. Knows no model, no text and no clock of its own."""
