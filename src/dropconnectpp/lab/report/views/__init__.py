"""Tables laid out for a reader: captions, headings, cells."""
