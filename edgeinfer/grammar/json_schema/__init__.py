"""JSON Schemas as grammars: every text that matches is valid, though not every valid text matches.

Objects have their properties in the order in which the schema declares them; properties that it does not declare are
written only where it says `additionalProperties`. What a grammar cannot promise is refused by its keyword.
"""
