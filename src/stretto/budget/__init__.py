"""Dial and cost: measure operating points, search among them, choose one."""
