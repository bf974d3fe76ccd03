"""Output for people: tables, plots and explanations."""
