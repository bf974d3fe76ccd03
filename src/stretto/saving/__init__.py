"""The saved folder: its format, its model card, and files written whole or not at all."""
