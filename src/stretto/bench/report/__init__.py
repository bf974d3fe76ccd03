"""From results to tables, plots and the generated parts of the documentation."""
