"""What people read: console, HTML, JUnit, plots."""
