"""The papers' tables beside the figures of finished runs."""
