"""The broker's database: tables, store, migrations."""
