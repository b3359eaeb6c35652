"""Time, memory and money: benchmarks and planning."""
