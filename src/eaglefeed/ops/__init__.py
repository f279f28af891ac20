"""What operates a run: metrics, the live view, the report, the doctor."""
