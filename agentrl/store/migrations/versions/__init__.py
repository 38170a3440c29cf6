"""One module per schema step; the file name starts with its revision, and revisions sort as text."""
