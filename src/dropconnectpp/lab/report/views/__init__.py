"""The tables of a report as a reader sees them: captions, headings, rounded cells and notes."""
