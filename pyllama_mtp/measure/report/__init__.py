"""A report: plots, tables and a page of what was measured. See :func:`.page.write_report`."""
