"""The tile lab: a page in the browser that plays with tile orders. Stands on tiles alone; no torch, no build step."""
