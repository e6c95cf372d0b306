"""Bodies of requests and answers, as pydantic models; they are what /openapi.json says."""
