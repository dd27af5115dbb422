"""Episodes that are kept and conversations that are read: collect, ingest, export, store, rows for fine-tuning."""
