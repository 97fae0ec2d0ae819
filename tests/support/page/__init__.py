"""What tests of the page need: sessions with words for tokens (`sessions`), and a browser (`browser`)."""
