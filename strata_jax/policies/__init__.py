"""Memory policies as pure state machines: from the present memory and what happens next they emit moves."""
