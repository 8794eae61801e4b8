"""How does a repository get in? Read and fetched, never run: files, licence, requirements, a locked environment."""
