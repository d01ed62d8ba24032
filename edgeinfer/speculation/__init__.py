"""Drafts and how they are accepted: pure decisions. Knows no model, no text and no clock of its own."""
