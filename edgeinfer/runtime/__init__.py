"""The generation loop. It is given its backend and never imports the C library."""
