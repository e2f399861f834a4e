"""Ways to show a report: tables, a page of charts, pictures."""
