"""What is kept of episodes, and made of conversations: collect, ingest, export, store, rows for fine-tuning."""
