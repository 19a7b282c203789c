"""The APIs that the server speaks: what may be asked, as a chat, and how the answer is written."""
