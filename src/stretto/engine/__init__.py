"""Two executors of one method: `reference` (padded, the oracle) and `packed` (fast)."""
