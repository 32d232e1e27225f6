"""The step loop shared by both workers, and the offline LLM."""
