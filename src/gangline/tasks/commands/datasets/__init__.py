"""Commands for datasets: data. Start with `data`."""
