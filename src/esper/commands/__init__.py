"""What the commands do. Like `cli`, these modules may use every part; nothing imports them but `cli`."""
