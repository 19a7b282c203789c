"""What other projects need to run the same model shapes beside nearfar."""
