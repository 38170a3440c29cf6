"""What people type. Every verb is a short function that imports what it needs when it is called."""
