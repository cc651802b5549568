"""What a program will take, told before it runs."""
