"""Shows a report as one page of HTML that fetches nothing."""
