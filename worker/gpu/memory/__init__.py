"""How a GPU's memory is shared out, and what is said when there is too little."""
