DECLARE
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    IF keeper <> current_user AND keeper !~ '^pg_' AND pg_has_role(keeper, 'MEMBER') THEN
        EXECUTE format('ALTER %s OWNER TO %I', what, keeper);
    END IF;
END
